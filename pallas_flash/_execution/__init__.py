"""Plans, launches and devices: below the derivatives, above the backends."""
