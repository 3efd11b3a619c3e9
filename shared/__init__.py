"""What decides (pure) and the plumbing every process shares."""
