"""The tables behind the defaults: every method by the protocol, against a MAP fit that is as well trained."""
