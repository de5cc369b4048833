"""YAML hardware profiles: schema, loader, arithmetic, launch."""
