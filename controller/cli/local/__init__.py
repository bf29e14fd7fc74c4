"""Local system of `fs up`, `fs down` and `fs dev`: supervisor, services, file watching."""
