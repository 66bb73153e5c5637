"""forerun's drafters inside other engines: one file per engine, each behind its pip extra."""
