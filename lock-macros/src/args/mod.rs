//! The arguments of the attribute, and their valid combinations.
//!
//! Mistakes are collected, so that one build shows all of them, each at its own token.

mod name;
mod value;

use std::{num::NonZeroU32, time::Duration};

use proc_macro2::Span;
use syn::{
    Expr, Ident, LitStr, Path, Token,
    ext::IdentExt as _,
    parse::{Parse, ParseStream},
};

pub(crate) use self::{
    name::nearest,
    value::{Given, OnBusy, Value, literal},
};
use crate::key::{Key, Keys};

/// The validated arguments.
pub(crate) struct Args {
    pub(crate) keys: Keys,
    /// The client to use; the ambient one if not given.
    pub(crate) client: Option<Given>,
    pub(crate) spec: Spec,
    /// The time for which the result of the body is kept, if it runs once.
    pub(crate) once: Option<Value<Duration>>,
    /// The name in metrics, traces and errors; the path of the function if not given.
    pub(crate) name: Option<LitStr>,
    /// The name of the lock in the body.
    pub(crate) held: Option<Ident>,
    pub(crate) on_busy: Option<OnBusy>,
    pub(crate) map_err: Option<Expr>,
    /// The path of lock-runtime; `::lock_runtime` if not given.
    pub(crate) runtime: Option<Path>,
}

/// The options of the lock.
#[derive(Default)]
pub(crate) struct Spec {
    pub(crate) base: Base,
    /// The setters of `LockSpec` to call, in the order of the arguments.
    pub(crate) options: Vec<(Ident, Setting)>,
}

/// The argument of a setter.
pub(crate) enum Setting {
    Flag,
    Duration(Value<Duration>),
    Count(Value<u64>),
    /// The name of a variant, or an expression.
    OnLost(Value<&'static str>),
}

/// The initial spec, which the other options modify.
#[derive(Default)]
pub(crate) enum Base {
    #[default]
    Exclusive,
    Shared,
    Permits(Value<NonZeroU32>),
    /// An existing spec, including the mode.
    Expr(Given),
}

impl Parse for Args {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut draft = Draft::default();
        while !input.is_empty() {
            if let Err(error) = draft.argument(input).and_then(|()| end_of_argument(input)) {
                draft.refuse(error);
                skip_to_comma(input)?;
            }
            input.parse::<Option<Token![,]>>()?;
        }
        draft.finish()
    }
}

/// The arguments parsed so far.
#[derive(Default)]
struct Draft {
    /// All arguments that were begun, valid or not.
    seen: Vec<Ident>,
    /// A key was begun, even if only its name was missing. "A lock needs a key" would then be
    /// misleading.
    key_begun: bool,
    error: Option<syn::Error>,
    keys: Option<Keys>,
    global: Option<Ident>,
    client: Option<Given>,
    base: Option<(Ident, Base)>,
    options: Vec<(Ident, Setting)>,
    once: Option<(Ident, Value<Duration>)>,
    name: Option<LitStr>,
    held: Option<Ident>,
    on_busy: Option<OnBusy>,
    map_err: Option<Expr>,
    runtime: Option<Path>,
}

impl Draft {
    fn refuse(&mut self, error: syn::Error) {
        match &mut self.error {
            Some(first) => first.combine(error),
            None => self.error = Some(error),
        }
    }

    /// Parses one argument, up to its comma.
    fn argument(&mut self, input: ParseStream<'_>) -> syn::Result<()> {
        if !input.peek(Ident::peek_any) {
            self.key_begun |= input.peek(LitStr);
            return Err(name::missing(input));
        }
        let name = input.call(Ident::parse_any)?;
        if self.seen.contains(&name) {
            return Err(syn::Error::new(
                name.span(),
                format!("`{name}` is given twice: keep one"),
            ));
        }
        self.seen.push(name.clone());
        match name.to_string().as_str() {
            "key" => {
                self.begin_key(&name)?;
                self.keys = Some(Keys::One(value::key(&name, input)?));
            }
            "keys" => {
                self.begin_key(&name)?;
                self.keys = Some(value::keys(&name, input)?);
            }
            "global" => {
                // Set even if a value follows; otherwise "or add `global`" would be misleading.
                self.global = Some(name.clone());
                value::flag(&name, input)?;
            }
            "client" => {
                self.client = Some(value::given(
                    &name,
                    "client = self.locks",
                    "LockClient",
                    input,
                )?)
            }
            "spec" => {
                let spec = value::given(&name, "spec = self.config.lock", "LockSpec", input)?;
                self.set_base(name, Base::Expr(spec))?;
            }
            "lease" | "wait" | "min_hold" | "max_hold" | "retain" => {
                let duration = value::duration(&name, input)?;
                self.set(name, Setting::Duration(duration))?;
            }
            "no_wait" | "no_max_hold" | "renew" | "no_renew" | "reentrant" | "no_reentrant"
            | "strict_order" | "no_strict_order" => {
                value::flag(&name, input)?;
                self.set(name, Setting::Flag)?;
            }
            "max_waiters" => {
                let count = value::max_waiters(&name, input)?;
                self.set(name, Setting::Count(count))?;
            }
            "exclusive" => {
                value::flag(&name, input)?;
                self.set_base(name, Base::Exclusive)?;
            }
            "shared" => {
                value::flag(&name, input)?;
                self.set_base(name, Base::Shared)?;
            }
            "permits" => {
                let permits = value::permits(&name, input)?;
                self.set_base(name, Base::Permits(permits))?;
            }
            "once" => {
                let keep = value::duration(&name, input)?;
                self.once = Some((name, keep));
            }
            "name" => self.name = Some(value::name(&name, input)?),
            "held" => self.held = Some(value::binding(&name, input)?),
            "on_busy" => self.on_busy = Some(value::on_busy(&name, input)?),
            "on_lost" => {
                let on_lost = value::on_lost(&name, input)?;
                self.set(name, Setting::OnLost(on_lost))?;
            }
            "map_err" => self.map_err = Some(value::function(&name, input)?),
            "crate" => self.runtime = Some(value::path(&name, input)?),
            _ => {
                let known = name::meant(&name, input);
                // The key is not missing, only misspelled.
                self.key_begun |= matches!(known, Some("key" | "keys"));
                return Err(name::unknown(&name, known, self.keys.is_some(), input));
            }
        }
        Ok(())
    }

    fn begin_key(&mut self, name: &Ident) -> syn::Result<()> {
        if std::mem::replace(&mut self.key_begun, true) {
            let message = "`key` and `keys` exclude each other: keep `key` for one lock, or put all of them into `keys(..)`";
            return Err(syn::Error::new(name.span(), message));
        }
        Ok(())
    }

    fn set_base(&mut self, name: Ident, base: Base) -> syn::Result<()> {
        if let Some((other, _)) = &self.base {
            let message = if name == "spec" || *other == "spec" {
                let mode = if name == "spec" { other } else { &name };
                format!(
                    "the mode is a part of the `spec`: set it there, or drop `spec` and keep `{mode}`"
                )
            } else {
                format!(
                    "`{other}` and `{name}` exclude each other: keep `shared` for one of many holders, `exclusive` for \
                     the only one, or `permits = n` for at most n holders"
                )
            };
            return Err(syn::Error::new(name.span(), message));
        }
        self.base = Some((name, base));
        Ok(())
    }

    /// Adds an option. Its opposite must not be set.
    fn set(&mut self, name: Ident, setting: Setting) -> syn::Result<()> {
        let opposes = |(other, _): &&(Ident, Setting)| {
            *other == format!("no_{name}") || name == format!("no_{other}")
        };
        if let Some((other, _)) = self.options.iter().find(opposes) {
            let message = if name == "wait" || name == "no_wait" {
                "`wait` and `no_wait` exclude each other: keep `wait = \"2s\"` to wait at most that long, or `no_wait` to \
                 give up at once"
                    .to_owned()
            } else {
                format!("`{other}` and `{name}` exclude each other: keep one")
            };
            return Err(syn::Error::new(name.span(), message));
        }
        self.options.push((name, setting));
        Ok(())
    }

    fn finish(mut self) -> syn::Result<Args> {
        self.check_holds();
        self.check_once();
        self.check_global();
        if !self.key_begun {
            self.refuse(missing_key());
        }
        match (self.error, self.keys) {
            (None, Some(keys)) => Ok(Args {
                keys,
                client: self.client,
                spec: Spec {
                    base: self.base.map(|(_, base)| base).unwrap_or_default(),
                    options: self.options,
                },
                once: self.once.map(|(_, keep)| keep),
                name: self.name,
                held: self.held,
                on_busy: self.on_busy,
                map_err: self.map_err,
                runtime: self.runtime,
            }),
            (error, _) => Err(error.unwrap_or_else(missing_key)),
        }
    }

    fn check_holds(&mut self) {
        let hold = |name| {
            let mut options = self.options.iter().enumerate();
            options.find_map(|(at, (option, setting))| match setting {
                Setting::Duration(Value::Literal(hold)) if option == name => {
                    Some((at, option.span(), *hold))
                }
                _ => None,
            })
        };
        if let (Some(min), Some(max)) = (hold("min_hold"), hold("max_hold"))
            && min.2 > max.2
        {
            let message = format!(
                "`min_hold` ({}) is longer than `max_hold` ({}): swap them, or leave one out",
                humantime::format_duration(min.2),
                humantime::format_duration(max.2)
            );
            let (_, span, _) = if min.0 > max.0 { min } else { max };
            self.refuse(syn::Error::new(span, message));
        }
    }

    /// Rejects what has no meaning for work that is done once.
    fn check_once(&mut self) {
        let Some((once, _)) = &self.once else { return };
        let mut errors = Vec::new();
        if matches!(self.keys, Some(Keys::Several(_) | Keys::Expr(_))) {
            let message = "`once` keeps a result for one key: write `key = ..`";
            errors.push(syn::Error::new(once.span(), message));
        }
        if let Some((mode, Base::Shared | Base::Permits(_))) = &self.base {
            let message =
                format!("work that is done `once` has one holder: leave `{mode}` or `once` out");
            errors.push(syn::Error::new(mode.span(), message));
        }
        for (option, _) in &self.options {
            let message = if option == "reentrant" {
                "work that is done `once` does not enter itself: leave `reentrant` or `once` out"
            } else if option == "min_hold" {
                "`once` keeps the result after the body, so `min_hold` has no meaning: leave one of the two out"
            } else {
                continue;
            };
            errors.push(syn::Error::new(option.span(), message));
        }
        errors.into_iter().for_each(|error| self.refuse(error));
    }

    /// Rejects a constant key without `global`: it lets only one call run at a time, which is
    /// rarely intended.
    fn check_global(&mut self) {
        let Some(keys) = &self.keys else { return };
        let mut texts = keys.each().filter_map(Key::template).peekable();
        let constant = texts.clone().find(|text| text.is_constant());
        let error = match (&self.global, constant) {
            (None, Some(constant)) => {
                let message = "every call has this same key, so one call at a time runs in the whole fleet: put a value into \
                               it, such as `\"order:{id}\"`, or add `global` if that is intended";
                syn::Error::new(constant.span(), message)
            }
            (Some(global), None) if texts.peek().is_some() => {
                let message = "`global` is for a key that is the same for every call, and this one has a placeholder: drop \
                               one of the two";
                syn::Error::new(global.span(), message)
            }
            _ => return,
        };
        self.refuse(error);
    }
}

fn missing_key() -> syn::Error {
    let message = "a lock needs a key: write `key = \"order:{id}\"`, or with a value that is not a variable, `key(\"order:{}\", order.id)`";
    syn::Error::new(Span::call_site(), message)
}

pub(crate) fn end_of_argument(input: ParseStream<'_>) -> syn::Result<()> {
    if input.is_empty() || input.peek(Token![,]) {
        return Ok(());
    }
    Err(input.error("the argument ends before this: write a `,` between two arguments"))
}

fn skip_to_comma(input: ParseStream<'_>) -> syn::Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
