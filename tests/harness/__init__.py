"""What tests share. Import it as `tests.harness`."""
