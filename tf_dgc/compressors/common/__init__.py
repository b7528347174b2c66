"""What several methods share: base classes, selection and coding of entries."""
