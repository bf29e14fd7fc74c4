"""What `fs up`, `down` and `dev` run on this machine."""
