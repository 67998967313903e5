"""Requests to the engines: payloads, slots, and what is pending."""
