"""Its place puts this folder on the import path, for the kits that several folders share."""
