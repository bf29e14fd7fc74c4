"""What a handler's author imports."""
