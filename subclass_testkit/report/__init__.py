"""Writers that turn results into what people and programs read."""
