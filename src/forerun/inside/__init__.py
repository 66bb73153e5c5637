"""forerun's drafters inside the engines that people already run: one file per engine, each behind its pip extra."""
