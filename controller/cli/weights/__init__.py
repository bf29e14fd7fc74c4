"""From weight files to a published checkpoint and back."""
