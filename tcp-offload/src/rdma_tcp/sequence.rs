//! The rules for the segments of one direction in stream order (section 4 of the proposal): numbers, and the two
//! messages that may be open at once, one of each group.

use super::{MessageNumber, Order, SegmentError, SegmentHeader, SegmentKind, SendControl};

/// An open message: its first segment has been received, its last one has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Open {
    order: Order,
    /// Bytes of payload received so far.
    received: u32,
    content: Content,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Send { control: SendControl, solicited: bool },
    Write { id: u32, next: u64, total: u32 },
}

/// The rules' state after the segments received so far, in stream order.
#[derive(Debug)]
pub struct Sequence {
    /// Number of the open Send, Write or Read Request, or else of the next one.
    due: MessageNumber,
    open: Option<Open>,
    /// Number of the open response.
    response: Option<MessageNumber>,
}

/// Properties of a Send that its first segment states for the whole message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendTerms {
    /// The control data.
    pub control: SendControl,
    /// The message raises a solicited event.
    pub solicited: bool,
}

impl Sequence {
    /// The sequence whose next message of group 1 has the number `due`.
    pub fn new(due: MessageNumber) -> Self {
        Self { due, open: None, response: None }
    }

    /// Number of the open Send, Write or Read Request, or else of the next one.
    pub fn due(&self) -> MessageNumber {
        self.due
    }

    /// Whether a Send is open.
    pub fn has_open_send(&self) -> bool {
        matches!(self.open, Some(Open { content: Content::Send { .. }, .. }))
    }

    /// Number of the open response, which the next response segment must continue.
    pub fn open_response(&self) -> Option<MessageNumber> {
        self.response
    }

    /// Checks that a segment with `payload` bytes of payload may come next. For a Send, returns the properties of the whole
    /// message.
    pub fn check(&self, header: &SegmentHeader, payload: u32) -> Result<Option<SendTerms>, SegmentError> {
        if let SegmentKind::ReadResponse { .. } = header.kind {
            return match self.response {
                None if header.first => Ok(None),
                Some(number) if !header.first && number == header.number => Ok(None),
                _ => Err(SegmentError::Message),
            };
        }
        if let SegmentKind::Send { control: control @ SendControl::Terminate { .. }, .. } = header.kind
            && self.open.is_some()
            && header.number == self.due.next()
        {
            // A19: the sender abandons the open message.
            return Ok(Some(SendTerms { control, solicited: header.solicited }));
        }
        if header.number != self.due {
            return Err(SegmentError::Number);
        }
        self.successor(header, payload).map(|open| match open.content {
            Content::Send { control, solicited } => Some(SendTerms { control, solicited }),
            Content::Write { .. } => None,
        })
    }

    /// Checks a segment as [`Self::check`] does, and advances past it.
    pub fn accept(&mut self, header: &SegmentHeader, payload: u32) -> Result<(), SegmentError> {
        self.check(header, payload)?;
        if let SegmentKind::ReadResponse { .. } = header.kind {
            self.response = (!header.last).then_some(header.number);
            return Ok(());
        }
        if header.number != self.due {
            (self.due, self.open) = (header.number.next(), None);
            return Ok(());
        }
        let open = self.successor(header, payload)?;
        self.open = (!header.last).then_some(open);
        if header.last {
            self.due = self.due.next();
        }
        Ok(())
    }

    /// The open message after this segment.
    fn successor(&self, header: &SegmentHeader, payload: u32) -> Result<Open, SegmentError> {
        let open = match (self.open, header.first) {
            (None, true) => Open { order: header.order, received: 0, content: Content::of(header) },
            (Some(open), false) => open,
            _ => return Err(SegmentError::Message),
        };
        if header.order != open.order {
            return Err(SegmentError::Message);
        }
        let received = open.received.checked_add(payload).ok_or(SegmentError::Length)?;
        let content = match (header.kind, open.content) {
            (SegmentKind::Send { offset, .. }, content @ Content::Send { solicited, .. }) => {
                if header.solicited != solicited {
                    return Err(SegmentError::Message);
                }
                if offset != open.received {
                    return Err(SegmentError::Offset);
                }
                content
            }
            (SegmentKind::Write { to, total }, Content::Write { id, next, total: announced }) => {
                if (to.id, total) != (id, announced) {
                    return Err(SegmentError::Message);
                }
                if to.offset != next {
                    return Err(SegmentError::Offset);
                }
                if received > total || header.last != (received == total) {
                    return Err(SegmentError::Length);
                }
                let next = next.checked_add(u64::from(payload)).ok_or(SegmentError::Offset)?;
                Content::Write { id, next, total }
            }
            (SegmentKind::ReadRequest { .. }, content @ Content::Send { .. }) if header.first => content,
            _ => return Err(SegmentError::Message),
        };
        Ok(Open { received, content, ..open })
    }
}

impl Content {
    /// The content of the message whose first segment has this header. A Read Request has one segment and is never open, so
    /// its content is not used.
    fn of(header: &SegmentHeader) -> Self {
        match header.kind {
            SegmentKind::Write { to, total } => Self::Write { id: to.id, next: to.offset, total },
            SegmentKind::Send { control, .. } => Self::Send { control, solicited: header.solicited },
            SegmentKind::ReadRequest { .. } | SegmentKind::ReadResponse { .. } => {
                Self::Send { control: SendControl::None, solicited: header.solicited }
            }
        }
    }
}

#[cfg(test)]
mod tests;
