"""What differs between kinds of device."""
