({
  init: () => ({ opened: 0, submitted: false }),
  view: (state, kit, config) => {
    const open = name => () => {
      if (name === config.wanted[state.opened]) state.opened += 1;
      else if (!config.wanted.slice(0, state.opened).includes(name)) state.submitted = true;  // another app fills the screen
    };
    const picture = icon => {
      const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
      svg.setAttribute('viewBox', '0 0 24 24');
      svg.setAttribute('aria-hidden', 'true');
      svg.innerHTML = icon;
      return svg;
    };
    const tile = name => {
      const { label, icon, color, ink } = config.tiles[name];
      const opened = config.wanted.slice(0, state.opened).includes(name);
      const look = opened ? `border: 2px solid ${color}; color: ${color}; background: none` : `color: ${ink}; background: ${color}`;
      return kit.button(name, picture(icon), kit.go(open(name)), { style: look, 'aria-label': opened ? `${label} (opened)` : label });
    };
    const tiles = config.orders[state.opened].map(tile);
    return [kit.node('div', { class: 'tiles', style: `background: ${config.background}; --share: ${config.tile_share}` }, tiles)];
  },
  goals: (state, config) => [...config.wanted.map((_, place) => place < state.opened), !state.submitted],
})
