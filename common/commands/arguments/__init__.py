"""What commands share: their options, flags for settings, how help looks, and what a command line leaves open."""
