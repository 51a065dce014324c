"""A trained model in use: opened from its checkpoint under any layout, it writes text or is measured on one."""
