//! The script and the style sheet of the pages.

use http::Uri;

/// A file that the pages refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asset {
    Script,
    Style,
}

impl Asset {
    pub(super) const SCRIPT: &str = concat!("?asset=script&v=", env!("CARGO_PKG_VERSION"));
    pub(super) const STYLE: &str = concat!("?asset=style&v=", env!("CARGO_PKG_VERSION"));

    /// Returns the asset that is requested, if one is. `Some(None)` for an unknown one.
    pub(super) fn requested(uri: &Uri) -> Option<Option<Self>> {
        let mut query = form_urlencoded::parse(uri.query()?.as_bytes());
        let (_, asset) = query.find(|(name, _)| name == "asset")?;
        Some(match &*asset {
            "script" => Some(Self::Script),
            "style" => Some(Self::Style),
            _ => None,
        })
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Script => "text/javascript; charset=utf-8",
            Self::Style => "text/css; charset=utf-8",
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Script => include_str!("script.js"),
            Self::Style => include_str!("style.css"),
        }
    }
}
