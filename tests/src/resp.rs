//! Boundaries between messages of the Redis protocol, without their meaning, except for a command's
//! name.
//!
//! [The protocol](https://redis.io/docs/latest/develop/reference/protocol-spec/), versions 2 and 3.

/// The length of the first message in `bytes`, or `None` when it is not complete yet.
pub(crate) fn message_len(bytes: &[u8]) -> Option<usize> {
    let line = line_len(bytes)?;
    // -1 is the null of version 2: a header without a body.
    let count = || {
        std::str::from_utf8(&bytes[1..line - 2])
            .ok()?
            .parse::<i64>()
            .ok()?
            .max(0)
            .try_into()
            .ok()
    };
    match (bytes[0], count()) {
        (b'$' | b'=' | b'!', Some(0)) if bytes[1] == b'-' => Some(line),
        (b'$' | b'=' | b'!', Some(length)) => {
            Some(line + length + 2).filter(|end: &usize| *end <= bytes.len())
        }
        (b'*' | b'~' | b'>', Some(count)) => messages_len(bytes, line, count),
        (b'%', Some(count)) => messages_len(bytes, line, 2 * count),
        // Attributes, and then the message that they belong to.
        (b'|', Some(count)) => messages_len(bytes, line, 2 * count + 1),
        // The simple types are one line, as is an inline command.
        _ => Some(line),
    }
}

/// Whether a message of the server is a push of version 3, which is not a reply.
pub(crate) fn is_push(message: &[u8]) -> bool {
    message.starts_with(b">")
}

/// Whether a push is a published message, rather than the confirmation of a subscription.
pub(crate) fn is_published(message: &[u8]) -> bool {
    // `message`, `pmessage` or `smessage`.
    is_push(message)
        && words(message)
            .nth(2)
            .is_some_and(|kind| kind.ends_with(b"message"))
}

/// A command's name in upper case.
pub(crate) fn command_name(message: &[u8]) -> String {
    let mut words = words(message);
    // An array starts with its length and the length of its first word.
    let name = if message.starts_with(b"*") {
        words.nth(2)
    } else {
        words.next()
    };
    String::from_utf8_lossy(name.unwrap_or_default()).to_ascii_uppercase()
}

fn words(message: &[u8]) -> impl Iterator<Item = &[u8]> {
    message
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|word| !word.is_empty())
}

fn messages_len(bytes: &[u8], start: usize, count: usize) -> Option<usize> {
    (0..count).try_fold(start, |end, _| Some(end + message_len(&bytes[end..])?))
}

fn line_len(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(2)
        .position(|pair| pair == b"\r\n")
        .map(|at| at + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_ends_where_the_next_message_begins() {
        let messages: &[&[u8]] = &[
            b"+OK\r\n",
            b"-ERR no\r\n",
            b":7\r\n",
            b"_\r\n",
            b"#t\r\n",
            b",1.5\r\n",
            b"(123\r\n",
            b"$-1\r\n",
            b"$0\r\n\r\n",
            b"$4\r\na\r\nb\r\n",
            b"!5\r\nERR x\r\n",
            b"=5\r\ntxt:a\r\n",
            b"*-1\r\n",
            b"*0\r\n",
            b"*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
            b"~1\r\n+a\r\n",
            b"%1\r\n+a\r\n*1\r\n:1\r\n",
            b"|1\r\n+ttl\r\n:9\r\n$1\r\nx\r\n",
            b">2\r\n+message\r\n+x\r\n",
            b"PING\r\n",
        ];
        for message in messages {
            let mut followed = message.to_vec();
            followed.extend(b"+next\r\n");
            assert_eq!(
                message_len(&followed),
                Some(message.len()),
                "{}",
                message.escape_ascii()
            );
            for end in 0..message.len() {
                assert_eq!(
                    message_len(&message[..end]),
                    None,
                    "{} cut at {end}",
                    message.escape_ascii()
                );
            }
        }
    }

    #[test]
    fn published_messages_differ_from_confirmations() {
        assert!(is_published(
            b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"
        ));
        assert!(is_published(
            b">3\r\n$8\r\nsmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"
        ));
        assert!(!is_published(
            b">3\r\n$9\r\nsubscribe\r\n$7\r\nmessage\r\n:1\r\n"
        ));
        assert!(!is_published(
            b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"
        ));
    }

    #[test]
    fn a_command_has_a_name() {
        assert_eq!(command_name(b"*2\r\n$3\r\nget\r\n$1\r\nx\r\n"), "GET");
        assert_eq!(command_name(b"ping\r\n"), "PING");
    }
}
