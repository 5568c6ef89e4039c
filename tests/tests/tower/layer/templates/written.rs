//! Random key templates together with the values of a request.

use std::fmt::Write as _;

use axum::{body::Body, http::Request};
use lock_runtime::{KeyWriter, LockError, LockKey};
use proptest::{collection::vec, prelude::*};

/// A piece of a template.
#[derive(Clone, Debug)]
pub(super) enum Part {
    Text(String),
    Value(Source, String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Source {
    Path,
    Header,
    Query,
}

/// A template with the values of a request. The placeholder of part 3 is named `v3`.
#[derive(Clone, Debug)]
pub(super) struct Written(pub(super) Vec<Part>);

/// A token of the intended meaning of a key, derived from the template and the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Token {
    /// One of `:/{}` in the text of the template.
    Mark(char),
    Char(char),
    /// The start of a value that no `:` or `/` of the text separates from the previous value.
    Value,
    /// Precedes the reserved word as a value at the start of the key.
    Word,
}

impl Written {
    pub(super) fn template(&self) -> String {
        let mut template = String::new();
        for (number, part) in self.0.iter().enumerate() {
            let _ = match part {
                Part::Text(text) => {
                    write!(template, "{}", text.replace('{', "{{").replace('}', "}}"))
                }
                Part::Value(Source::Path, _) => write!(template, "{{v{number}}}"),
                Part::Value(Source::Header, _) => write!(template, "{{header.v{number}}}"),
                Part::Value(Source::Query, _) => write!(template, "{{query.v{number}}}"),
            };
        }
        template
    }

    /// The route, with all path parameters.
    pub(super) fn route(&self) -> String {
        let of_path = |(number, part): (usize, &Part)| match part {
            Part::Value(Source::Path, _) => Some(format!("/{{v{number}}}")),
            _ => None,
        };
        format!(
            "/r{}",
            self.0
                .iter()
                .enumerate()
                .filter_map(of_path)
                .collect::<String>()
        )
    }

    /// A request with the values. `choices` selects how each byte is encoded.
    pub(super) fn request(&self, choices: &[u8]) -> Request<Body> {
        let mut encoder = Encoder {
            choices: choices.iter().copied().cycle(),
        };
        let (mut path, mut query) = ("/r".to_owned(), String::from("?other=1"));
        let mut request = Request::post("/");
        for (number, part) in self.0.iter().enumerate() {
            match part {
                Part::Text(_) => {}
                Part::Value(Source::Path, value) => {
                    path.push('/');
                    encoder.encode(value, b"-._~!$&'()*+,;=:@", &mut path);
                }
                Part::Value(Source::Query, value) => {
                    query.push('&');
                    encoder.encode(&format!("v{number}"), b"", &mut query);
                    query.push('=');
                    encoder.encode(value, b"-._~!$'()*,;=:@/? ", &mut query);
                }
                Part::Value(Source::Header, value) => {
                    request = request.header(format!("V{number}"), value.as_bytes());
                }
            }
        }
        request.uri(path + &query).body(Body::empty()).unwrap()
    }

    /// The key of the same values from [`KeyWriter`], which the macro uses.
    pub(super) fn key(&self) -> Result<LockKey, LockError> {
        let mut key = KeyWriter::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => key.lit(text),
                Part::Value(_, value) => key.arg(format_args!("{value}")),
            };
        }
        key.finish()
    }

    /// The intended meaning of the key. Keys are equal if and only if their readings are: a `:` of
    /// a value differs from a `:` of the text, and adjacent values are kept apart. The text must
    /// not contain `%`, which starts an escape.
    pub(super) fn reading(&self) -> Vec<Token> {
        let mut reading = Vec::new();
        let mut open = false;
        for part in &self.0 {
            match part {
                Part::Text(text) => {
                    assert!(!text.contains('%'));
                    open &= !text.contains([':', '/']);
                    let of_text = |c| {
                        if matches!(c, ':' | '/' | '{' | '}') {
                            Token::Mark(c)
                        } else {
                            Token::Char(c)
                        }
                    };
                    reading.extend(text.chars().map(of_text));
                }
                Part::Value(_, value) => {
                    if open {
                        reading.push(Token::Value);
                    }
                    if reading.is_empty() && value == "permits" {
                        reading.push(Token::Word);
                    }
                    open = true;
                    reading.extend(value.chars().map(Token::Char));
                }
            }
        }
        reading
    }

    /// The same template with other values. Those beyond the end of `values` are kept.
    pub(super) fn with_values(&self, values: &[String]) -> Self {
        let mut values = values.iter();
        let with = |part: &Part| match part {
            Part::Value(source, old) => {
                Part::Value(*source, fit(*source, values.next().unwrap_or(old)))
            }
            text => text.clone(),
        };
        Self(self.0.iter().map(with).collect())
    }
}

/// Makes a value fit its source: that of a header has no control characters and is not empty.
fn fit(source: Source, value: &str) -> String {
    if source != Source::Header {
        return value.to_owned();
    }
    let value: String = value
        .chars()
        .filter(|c| !c.is_control() || matches!(c, '\u{80}'..='\u{9f}'))
        .collect();
    if value.is_empty() { "-".into() } else { value }
}

struct Encoder<I> {
    choices: I,
}

impl<I: Iterator<Item = u8>> Encoder<I> {
    /// Writes letters, digits and bytes of `may_stand` plain or percent-encoded, and encodes all
    /// other bytes. A plain space is written as `+`.
    fn encode(&mut self, value: &str, may_stand: &[u8], to: &mut String) {
        for byte in value.bytes() {
            let stands = byte.is_ascii_alphanumeric() || may_stand.contains(&byte);
            let _ = match self.choices.next().unwrap_or_default() % 3 {
                0 if stands => write!(to, "{}", if byte == b' ' { '+' } else { char::from(byte) }),
                1 => write!(to, "%{byte:02x}"),
                _ => write!(to, "%{byte:02X}"),
            };
        }
    }
}

/// Text from a small alphabet, for frequent collisions, and with the special characters of keys.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![6 => "[a1:/.-]{0,3}", 1 => Just("permits".into()), 1 => "\\{[a1]?", 1 => "[a1]?\\}", 1 => "\\{[a1]{1,2}\\}"]
}

pub(super) fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => "[a1:/.%{} +-]{1,3}",
        1 => proptest::sample::select(&["permits", "permits:", "permi", "ts", "%.", "%3A", "%70ermits", "..", "."][..]).prop_map(str::to_owned),
        1 => "\\PC{1,8}",
        1 => proptest::collection::vec(any::<char>(), 1..5).prop_map(String::from_iter),
    ]
}

pub(super) fn written() -> impl Strategy<Value = Written> {
    let source = proptest::sample::select(&[Source::Path, Source::Header, Source::Query][..]);
    let placed =
        (source, value()).prop_map(|(source, value)| Part::Value(source, fit(source, &value)));
    vec(prop_oneof![text().prop_map(Part::Text), placed], 1..5).prop_map(Written)
}
