"""`fs shell`, the controller's side."""
