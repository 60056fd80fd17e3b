"""Routers that follow routes which the trainer gives them."""
