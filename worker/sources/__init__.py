"""Where models come from: a source is opened, checked, converted once if need be, and described."""
