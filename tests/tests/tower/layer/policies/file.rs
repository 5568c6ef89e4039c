//! A model of policy files: routes as data, and a second implementation of the matching rules,
//! segment by segment and without a router.

use std::fmt::Write as _;

use axum::http::Method;
use proptest::{prelude::*, sample::select};

/// A segment of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Text(&'static str),
    /// A parameter with the text before it.
    Param(&'static str),
    /// A catch-all parameter with the text before it.
    Rest(&'static str),
}

/// A route of a file: its methods, empty for all, and its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) methods: Vec<Method>,
    pub(super) parts: Vec<Part>,
}

pub(super) const METHODS: [Method; 5] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::DELETE,
];

impl Route {
    /// The path, with doubled braces. A parameter is named after its segment: `p0`.
    pub(super) fn path(&self) -> String {
        let mut path = String::new();
        let doubled = |text: &str| text.replace('{', "{{").replace('}', "}}");
        for (index, part) in self.parts.iter().enumerate() {
            match part {
                Part::Text(text) => write!(path, "/{}", doubled(text)),
                Part::Param(before) => write!(path, "/{}{{p{index}}}", doubled(before)),
                Part::Rest(before) => write!(path, "/{}{{*p{index}}}", doubled(before)),
            }
            .unwrap();
        }
        path
    }

    /// The names of the parameters.
    pub(super) fn params(&self) -> Vec<String> {
        let params = self
            .parts
            .iter()
            .enumerate()
            .filter(|(_, part)| !matches!(part, Part::Text(_)));
        params.map(|(index, _)| format!("p{index}")).collect()
    }

    /// The route as it is written in a policy file.
    pub(super) fn written(&self) -> String {
        let methods: Vec<_> = self.methods.iter().map(Method::as_str).collect();
        let blank = if methods.is_empty() { "" } else { " " };
        format!("{}{blank}{}", methods.join("|"), self.path())
    }

    /// How well the route matches the method: the lower, the better. `None` if it does not.
    fn rank(&self, method: &Method) -> Option<usize> {
        match &self.methods[..] {
            [] => Some(2),
            methods if methods.contains(method) => Some(0),
            methods if method == Method::HEAD && methods.contains(&Method::GET) => Some(1),
            methods if method == Method::CONNECT && methods.contains(&Method::GET) => Some(3),
            _ => None,
        }
    }

    /// Returns whether the path matches. Only a parameter at the end must not be empty.
    fn fits(&self, path: &str) -> bool {
        let Some(path) = path.strip_prefix('/') else {
            return false;
        };
        let segments: Vec<_> = path.split('/').collect();
        for (index, part) in self.parts.iter().enumerate() {
            let Some(segment) = segments.get(index) else {
                return false;
            };
            let last = index + 1 == segments.len();
            let fits = match part {
                Part::Text(text) => segment == text,
                Part::Param(before) => segment
                    .strip_prefix(before)
                    .is_some_and(|value| !(last && value.is_empty())),
                Part::Rest(before) => {
                    return segments[index..]
                        .join("/")
                        .strip_prefix(before)
                        .is_some_and(|rest| !rest.is_empty());
                }
            };
            if !fits {
                return false;
            }
        }
        segments.len() == self.parts.len()
    }

    /// Returns whether the path is more specific than that of `other`, if both match a request.
    fn is_before(&self, other: &Self) -> bool {
        let literal = |part: &Part| match part {
            Part::Text(_) => usize::MAX,
            Part::Param(before) | Part::Rest(before) => before.len(),
        };
        let differing = self
            .parts
            .iter()
            .zip(&other.parts)
            .find(|(part, other)| part != other);
        differing.is_some_and(|(part, other)| literal(part) > literal(other))
    }

    /// Returns whether no router can have both paths: a parameter beside a catch-all.
    fn contradicts(&self, other: &Self) -> bool {
        let differing = self
            .parts
            .iter()
            .zip(&other.parts)
            .find(|(part, other)| part != other);
        match differing {
            Some(
                (Part::Param(before), Part::Rest(other)) | (Part::Rest(before), Part::Param(other)),
            ) => before == other,
            _ => false,
        }
    }
}

/// The index of the route that a request matches.
pub(super) fn meant(routes: &[Route], method: &Method, path: &str) -> Option<usize> {
    let fitting = routes
        .iter()
        .enumerate()
        .filter(|(_, route)| route.fits(path));
    let ranked = fitting.filter_map(|(index, route)| Some((route.rank(method)?, index)));
    ranked
        .reduce(|best, next| {
            let (one, other) = (&routes[best.1], &routes[next.1]);
            match () {
                () if one.parts == other.parts => best.min(next),
                () if one.is_before(other) => best,
                () => next,
            }
        })
        .map(|(_, index)| index)
}

/// Texts that are easily confused with each other.
const TEXTS: [&str; 15] = [
    "a", "ab", "abc", "a-", "b", "export", "%61", "a%2Fb", "%2F", ".", "..", "", "{a}", "a.b", "~",
];

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        3 => select(&TEXTS[..]).prop_map(Part::Text),
        3 => select(vec!["", "", "a", "a-", "%", "{"]).prop_map(Part::Param),
    ]
}

fn route() -> impl Strategy<Value = Route> {
    let methods = prop_oneof![
        2 => Just(Vec::new()),
        3 => select(&METHODS[..]).prop_map(|method| vec![method]),
        1 => proptest::sample::subsequence(METHODS.to_vec(), 2..4),
    ];
    let rest = prop::option::weighted(0.25, select(vec!["", "", "a", "a-"]).prop_map(Part::Rest));
    (methods, proptest::collection::vec(part(), 1..4), rest).prop_map(
        |(methods, mut parts, rest)| {
            parts.extend(rest);
            Route { methods, parts }
        },
    )
}

/// Routes of one file. None contradicts another.
pub(super) fn routes() -> impl Strategy<Value = Vec<Route>> {
    proptest::collection::vec(
        (route(), any::<prop::sample::Index>(), any::<bool>()),
        1..10,
    )
    .prop_map(|many| {
        let mut routes: Vec<Route> = Vec::new();
        for (mut route, of, again) in many {
            // Routes of a service often differ only in their methods.
            if again && !routes.is_empty() {
                route
                    .parts
                    .clone_from(&routes[of.index(routes.len())].parts);
            }
            let taken = |other: &Route| {
                let same = other
                    .methods
                    .iter()
                    .any(|method| route.methods.contains(method));
                other.parts == route.parts
                    && (same || other.methods.is_empty() && route.methods.is_empty())
            };
            if !routes
                .iter()
                .any(|other| taken(other) || other.contradicts(&route))
            {
                routes.push(route);
            }
        }
        routes
    })
}

/// The path of a request. Most of them match a route, or nearly.
pub(super) fn path(routes: &[Route]) -> impl Strategy<Value = String> + use<> {
    let segment = || {
        select(
            [
                &TEXTS[..],
                &[
                    "7", "a-7", "a7", "abx", "%41", "%252F", "a:b", "%00", "{}", "x%2F..", "A",
                ],
            ]
            .concat(),
        )
    };
    let filled = (
        select(routes.to_vec()),
        proptest::collection::vec(segment(), 8),
    )
        .prop_map(move |(route, values)| {
            let segments = route
                .parts
                .iter()
                .zip(&values)
                .map(|(part, value)| match part {
                    Part::Text(text) => (*text).to_owned(),
                    Part::Param(before) => format!("{before}{value}"),
                    Part::Rest(before) => format!("{before}{value}/{}", values[7]),
                });
            segments
                .map(|segment| format!("/{segment}"))
                .collect::<String>()
        });
    let any = proptest::collection::vec(segment(), 1..5)
        .prop_map(|segments| format!("/{}", segments.join("/")));
    let twisted = (filled, 0..8_u8, segment()).prop_map(|(path, twist, segment)| match twist {
        0 => path + "/",
        1 => path.replacen('/', "//", 1),
        2 => format!("{path}/{segment}"),
        3 => path
            .rsplit_once('/')
            .map_or("/".into(), |(before, _)| format!("{before}/{segment}")),
        4 => path
            .rsplit_once('/')
            .map_or("/".into(), |(before, _)| before.to_owned() + "/"),
        _ => path,
    });
    prop_oneof![4 => twisted, 1 => any]
}

pub(super) fn method() -> impl Strategy<Value = Method> {
    let unknown = Method::from_bytes(b"PURGE").unwrap();
    select(
        [
            &METHODS[..],
            &[Method::OPTIONS, Method::PATCH, Method::CONNECT, unknown],
        ]
        .concat(),
    )
}

/// The text as a basic string of TOML.
pub(super) fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
        c => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}
