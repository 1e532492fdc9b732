"""What every process needs the same way; each module is imported by its own name."""
