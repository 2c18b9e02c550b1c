"""What the processes of a run say to one another."""
