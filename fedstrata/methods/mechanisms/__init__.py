"""What several methods are made of; nothing here is a method by itself."""
