# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of an engine process of its own: start it, talk to it, notice its end."""
