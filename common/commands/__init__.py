"""The `lopa` command: `main` puts it together, `arguments` is what commands share, `job` is what the scripts start, the
others are one subcommand each."""
