"""What spans leave for their children, and what they get back."""
