"""The core inside other engines: every page of theirs gets an owner, checked before release."""
