"""Who is let in, and what a rejected caller is told."""
