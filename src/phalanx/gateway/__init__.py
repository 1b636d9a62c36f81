"""The gateway: one address for all services, with OpenAI's routes. A process of its own, which goes on while the head is away.

`prefixes` and `routing` are pure; `services` holds what the gateway knows of each service, `head_link` keeps it up to date and checks keys, and
`relay` passes requests and answers.
"""
