"""Plans and timelines as pictures and traces."""
