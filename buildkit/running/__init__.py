"""Running an image: flags, formats, batch scripts, engines and nodes."""
