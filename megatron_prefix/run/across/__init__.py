"""What rollouts on several data-parallel ranks could share."""
