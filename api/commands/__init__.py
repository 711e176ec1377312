"""What a person types: one module per group of commands."""
