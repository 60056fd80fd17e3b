"""Says where a step stands that takes far too long (`PrefixConfig.watchdog_minutes`)."""
