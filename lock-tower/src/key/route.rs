//! The route that axum's router has matched for a request.

use std::borrow::Cow;

use axum::extract::{
    FromRequestParts, MatchedPath, OriginalUri, RawPathParams, rejection::RawPathParamsRejection,
};
use futures_util::FutureExt;
use http::Request;

use super::{KeyError, Routed, template::source::Source};

pub(super) fn matched_path<B>(req: &Request<B>) -> Option<&str> {
    req.extensions().get().map(MatchedPath::as_str)
}

/// The matched route of a request, with the values of its parameters.
pub(super) struct Route {
    pattern: Option<MatchedPath>,
    params: Option<RawPathParams>,
}

impl Route {
    /// Returns the route of `req`, or `None` if no route has matched, so that a 404 stays a 404.
    ///
    /// axum does not report that a `nest_service` has matched. It counts as a route if its path
    /// has all the requested parameters, so that the request is not served without its lock.
    pub(super) fn of<'n, B>(
        req: &mut Request<B>,
        mut sources: impl Iterator<Item = &'n Source>,
    ) -> Result<Option<Self>, KeyError> {
        let pattern = req.extensions().get::<MatchedPath>().cloned();
        if pattern.is_none() && req.extensions().get::<OriginalUri>().is_none() {
            return Err(KeyError::NotRouted);
        }
        let route = Self {
            pattern,
            params: params(req)?,
        };
        let has = |source: &Source| match source {
            Source::Path(name, _) => route.param(name).is_ok(),
            Source::MatchedPath => false,
            _ => true,
        };
        let matched = route.pattern.is_some() || sources.all(has);
        Ok(matched.then_some(route))
    }

    fn shown(&self) -> Box<str> {
        self.pattern.as_ref().map_or("", MatchedPath::as_str).into()
    }
}

impl Routed for Route {
    fn param(&self, name: &str) -> Result<Cow<'_, str>, KeyError> {
        let of_name = |(key, value)| (key == name).then_some(value);
        let mut values = self.params.iter().flatten().filter_map(of_name);
        match (values.next(), values.next()) {
            (Some(value), None) => Ok(Cow::Borrowed(value)),
            (None, _) => Err(KeyError::NoSuchParameter {
                name: name.into(),
                route: self.shown(),
            }),
            (Some(_), Some(_)) => Err(KeyError::RepeatedParameter {
                name: name.into(),
                route: self.shown(),
            }),
        }
    }

    fn pattern(&self) -> Result<&str, KeyError> {
        self.pattern
            .as_ref()
            .map(MatchedPath::as_str)
            .ok_or(KeyError::NotRouted)
    }
}

fn params<B>(req: &mut Request<B>) -> Result<Option<RawPathParams>, KeyError> {
    // The extractor takes the parts of a request but reads only the extensions, so they are moved
    // into empty parts for the call.
    let (mut parts, ()) = Request::new(()).into_parts();
    std::mem::swap(&mut parts.extensions, req.extensions_mut());
    let params = RawPathParams::from_request_parts(&mut parts, &()).now_or_never();
    std::mem::swap(&mut parts.extensions, req.extensions_mut());
    match params {
        Some(Ok(params)) => Ok(Some(params)),
        Some(Err(RawPathParamsRejection::InvalidUtf8InPathParam(error))) => {
            Err(KeyError::bad_request(error.body_text()))
        }
        // The extractor never waits.
        Some(Err(_)) | None => Ok(None),
    }
}
