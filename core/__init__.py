"""What every process needs: errors, settings, messages, channels, a daemon's life."""
