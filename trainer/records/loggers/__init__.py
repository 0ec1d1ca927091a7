"""Loggers for metrics, one file each. The file defines `ROW`, a `trainer.records.logger.LoggerRow`."""
