"""Responses API: `/v1/responses` over the same chats, its items and events."""
