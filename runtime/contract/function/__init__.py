"""What a user deploys."""
