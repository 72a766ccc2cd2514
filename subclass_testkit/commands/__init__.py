"""What the `subclass-testkit` command does, a file for each concern."""
