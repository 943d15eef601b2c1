"""Skeleton images: engines on disk, without weights. What they depend on, where they are kept, how they are made and used."""
