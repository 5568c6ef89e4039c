//! Expansion of the options of a lock to an expression of type `LockSpec`.

use std::time::Duration;

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens as _, quote_spanned};

use crate::{
    args::{Base, Setting, Spec, Value},
    runtime::Runtime,
};

impl Spec {
    /// Expands to the spec, as a constant if possible.
    pub(crate) fn expand(&self, runtime: &Runtime) -> TokenStream {
        let span = Span::mixed_site();
        let mut chain = Chain::on(&self.base, runtime);
        for (name, setting) in &self.options {
            chain.set(name, setting, runtime);
        }
        let Chain {
            tokens,
            is_constant,
        } = chain;
        if is_constant {
            quote_spanned!(span=> const { #tokens })
        } else {
            tokens
        }
    }
}

/// Expands to a duration.
pub(crate) fn duration(value: &Value<Duration>) -> TokenStream {
    match value {
        Value::Literal(duration) => {
            let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
            quote_spanned!(Span::mixed_site()=> ::core::time::Duration::new(#secs, #nanos))
        }
        Value::Expr(given) => given.value(|span| quote_spanned!(span=> ::core::time::Duration)),
    }
}

/// The call chain `LockSpec::exclusive().lease(..)` built so far.
struct Chain {
    tokens: TokenStream,
    is_constant: bool,
}

impl Chain {
    fn on(base: &Base, runtime: &Runtime) -> Self {
        let span = Span::mixed_site();
        let rt = runtime.at(span);
        let tokens = match base {
            Base::Exclusive => quote_spanned!(span=> #rt::LockSpec::exclusive()),
            Base::Shared => quote_spanned!(span=> #rt::LockSpec::shared()),
            // n is written as 1 + (n - 1), to avoid an `unwrap` in the user's code.
            Base::Permits(Value::Literal(permits)) => {
                let more = permits.get() - 1;
                quote_spanned!(span=> #rt::LockSpec::permits(::core::num::NonZeroU32::MIN.saturating_add(#more)))
            }
            Base::Permits(Value::Expr(permits)) => {
                let permits = permits.value(|span| quote_spanned!(span=> ::core::num::NonZeroU32));
                quote_spanned!(span=> #rt::LockSpec::permits(#permits))
            }
            Base::Expr(spec) => spec.cloned(|span| {
                let rt = runtime.at(span);
                quote_spanned!(span=> #rt::LockSpec)
            }),
        };
        let is_constant = !matches!(base, Base::Permits(Value::Expr(_)) | Base::Expr(_));
        Self {
            tokens,
            is_constant,
        }
    }

    fn set(&mut self, name: &Ident, setting: &Setting, runtime: &Runtime) {
        let span = Span::mixed_site();
        let value = match setting {
            Setting::Flag => TokenStream::new(),
            Setting::Duration(value) => {
                self.is_constant &= matches!(value, Value::Literal(_));
                duration(value)
            }
            Setting::Count(Value::Literal(count)) => {
                Literal::u64_unsuffixed(*count).into_token_stream()
            }
            Setting::Count(Value::Expr(given)) => {
                self.is_constant = false;
                given.value(|span| quote_spanned!(span=> ::core::primitive::usize))
            }
            Setting::OnLost(Value::Literal(variant)) => {
                let (rt, variant) = (runtime.at(span), Ident::new(variant, span));
                quote_spanned!(span=> #rt::OnLost::#variant)
            }
            Setting::OnLost(Value::Expr(given)) => {
                self.is_constant = false;
                given.value(|span| {
                    let rt = runtime.at(span);
                    quote_spanned!(span=> #rt::OnLost)
                })
            }
        };
        let setter = Ident::new(&name.to_string(), span);
        self.tokens.extend(quote_spanned!(span=> .#setter(#value)));
    }
}
