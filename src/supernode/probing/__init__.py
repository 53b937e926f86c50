"""What the user's module and this computer take when they are tried."""
