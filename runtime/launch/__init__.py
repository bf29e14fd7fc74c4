"""Fork server and gVisor launcher, warm-up."""
