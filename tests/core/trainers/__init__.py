"""The prefix schedule inside trainers that people use: their own code, stock against prefix."""
