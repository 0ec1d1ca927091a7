"""The network of this host: its adapters and interfaces, which of them to use, and the settings that say so."""
