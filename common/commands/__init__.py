"""The `lopa` command: `main` puts it together, the others are one subcommand each; `job` stands behind the scripts."""
