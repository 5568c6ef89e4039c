//! The query of a request: a view and its format, and links to views.

use std::borrow::Cow;

use form_urlencoded::Serializer;
use http::{header, request::Parts};
use lock_runtime::{LockKey, LockKind};

/// The longest prefix to search for, that of a key.
const MAX_PREFIX_BYTES: usize = lock_runtime::LockKey::MAX_BYTES;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) view: View,
    pub(super) format: Format,
}

/// A page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum View {
    Locks {
        prefix: String,
        after: Option<(LockKey, LockKind)>,
    },
    Lock {
        key: LockKey,
        kind: LockKind,
    },
    Activity,
    Health,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Html,
    Json,
    /// Server-sent events, each with the changing part of the page.
    Events,
}

impl Query {
    pub(super) fn parse(parts: &Parts) -> Result<Self, &'static str> {
        let query = parts.uri.query().unwrap_or_default();
        let (mut view, mut format, mut key) = (None, None, None);
        let (mut prefix, mut after, mut kind) = (String::new(), None, LockKind::Lock);
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "view" => view = Some(value),
                "format" => format = Some(value),
                "prefix" => prefix = value.into_owned(),
                "key" => key = Some(value),
                "kind" => kind = parse_kind(&value)?,
                "after" if !value.is_empty() => after = Some(parse_after(&value)?),
                // Proxies add parameters of their own.
                _ => {}
            }
        }
        if prefix.len() > MAX_PREFIX_BYTES {
            return Err("the prefix is longer than a key can be");
        }
        let view = match (view.as_deref(), key) {
            (None | Some("locks"), None) => View::Locks { prefix, after },
            (None, Some(key)) => View::Lock {
                key: parse_key(&key)?,
                kind,
            },
            (Some("activity"), None) => View::Activity,
            (Some("health"), None) => View::Health,
            _ => return Err("there is no such view"),
        };
        let format = match format.as_deref() {
            None if accepts_json(parts) => Format::Json,
            None => Format::Html,
            Some("json") => Format::Json,
            Some("events") => Format::Events,
            Some(_) => return Err("`format` is json, events or absent"),
        };
        Ok(Self { view, format })
    }
}

/// Whether JSON is requested and HTML is not.
pub(super) fn accepts_json(parts: &Parts) -> bool {
    let accepted = parts.headers.get_all(header::ACCEPT).iter();
    let mut accepted = accepted.filter_map(|value| value.to_str().ok());
    accepted.any(|value| value.contains("application/json") && !value.contains("text/html"))
}

pub(super) fn parse_key(key: &str) -> Result<LockKey, &'static str> {
    LockKey::new(key).map_err(|_| "the key is not a valid name of a lock")
}

pub(super) fn parse_kind(kind: &str) -> Result<LockKind, &'static str> {
    match kind {
        "lock" => Ok(LockKind::Lock),
        "permits" => Ok(LockKind::Permits),
        _ => Err("`kind` is lock or permits"),
    }
}

pub(super) fn kind_name(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Permits => "permits",
        _ => "lock",
    }
}

/// A lock in the format `kind:key`.
fn parse_after(after: &str) -> Result<(LockKey, LockKind), &'static str> {
    let (kind, key) = after.split_once(':').unwrap_or_default();
    Ok((parse_key(key)?, parse_kind(kind)?))
}

impl View {
    /// Returns the link to the view.
    pub(super) fn link(&self, format: Format) -> String {
        let mut query = Serializer::for_suffix(String::from("?"), 1);
        let mut add = |name: &str, value: Cow<'_, str>| {
            query.append_pair(name, &value);
        };
        match self {
            Self::Locks { prefix, after } => {
                if !prefix.is_empty() {
                    add("prefix", prefix.into());
                }
                if let Some((key, kind)) = after {
                    add("after", format!("{}:{key}", kind_name(*kind)).into());
                }
            }
            Self::Lock { key, kind } => {
                add("key", key.as_str().into());
                if *kind == LockKind::Permits {
                    add("kind", kind_name(*kind).into());
                }
            }
            Self::Activity => add("view", "activity".into()),
            Self::Health => add("view", "health".into()),
        }
        match format {
            Format::Html => {}
            Format::Json => add("format", "json".into()),
            Format::Events => add("format", "events".into()),
        }
        query.finish()
    }

    /// Whether the view needs the names of all locks.
    pub(super) fn reads_all_names(&self) -> bool {
        matches!(self, Self::Locks { .. })
    }

    /// The first page of all locks.
    pub(super) fn all_locks() -> Self {
        Self::Locks {
            prefix: String::new(),
            after: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parse(query: &str) -> Result<Query, &'static str> {
        let uri = format!("/locks{query}");
        Query::parse(&Request::get(uri).body(()).unwrap().into_parts().0)
    }

    #[test]
    fn a_link_is_parsed_as_its_view() {
        let key = LockKey::new("a&b=c#d?<script>é\u{202e}{t}:1").unwrap();
        for view in [
            View::all_locks(),
            View::Locks {
                prefix: "order:&%".into(),
                after: Some((key.clone(), LockKind::Permits)),
            },
            View::Lock {
                key: key.clone(),
                kind: LockKind::Lock,
            },
            View::Lock {
                key,
                kind: LockKind::Permits,
            },
            View::Activity,
            View::Health,
        ] {
            for format in [Format::Html, Format::Json, Format::Events] {
                let link = view.link(format);
                let expected = Query {
                    view: view.clone(),
                    format,
                };
                assert_eq!(parse(&link), Ok(expected), "{link}");
            }
        }
    }

    #[test]
    fn an_invalid_query_is_refused() {
        for query in [
            "?view=secrets",
            "?format=xml",
            "?key=",
            "?key=a%0Ab",
            "?key=a&kind=both",
            "?after=a",
            "?after=lock:",
            "?view=health&key=a",
            &format!("?prefix={}", "x".repeat(513)),
        ] {
            assert!(parse(query).is_err(), "{query}");
        }
        assert!(parse("?utm_source=x").is_ok());
    }
}
