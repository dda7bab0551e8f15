"""What this machine can run, and why it cannot run the rest."""
